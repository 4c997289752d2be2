"""`python -m nosquare` is the `nosquare` command."""

from .cli import main

main()

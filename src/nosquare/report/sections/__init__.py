"""The parts of a report, one a file: each takes a Book and gives a page.Section."""

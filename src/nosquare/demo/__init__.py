"""`nosquare demo`: real models and text, one attention a process, checked and measured."""

"""Other libraries ' interfaces to nosquare; each is imported only when it is asked for."""

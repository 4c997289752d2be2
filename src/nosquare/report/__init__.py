"""`nosquare report`: what the records say, and what may be claimed from them.

evidence (records with their places) -> noise, rules, grade (claims and verdicts) -> sections, which
run puts on a page and into a terminal; readme puts tables between the markers of a document.
"""

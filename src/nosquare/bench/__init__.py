"""Benchmarks: every contestant is checked before it is timed, and every sample is kept.

cases (what is asked) -> contestants (who answers) -> check (is it right) -> timing (how long) and
memory (how much) -> record (evidence, one JSON line a case) and report (a table). `cpu` holds the
cases of `nosquare bench cpu`.
"""

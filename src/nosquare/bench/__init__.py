"""Benchmarks: every contestant is checked before it is timed, and every sample is kept.

What is asked    cases (the grammar, and the numbers)
Who answers      contestants (what one is; nosquare), peers (torch, FlashAttention), flex, tiled
Is it right      check (float64 on the same numbers; dropout masks drawn again)
How long         clocks (what a sample is, on a CPU and on a card), timing (in turns), watch (clocks
                 and power of a card meanwhile)
How much         memory (fresh processes; on a card its allocator), ncu (bytes moved), model
Which plan       tune (the plans of one backend), ahead (kernels compiled in other processes)
Evidence         record (one JSON line a case, by nosquare.records)
On the screen    report (two contestants), table (many), findings (the experiment), tuned, screen

Commands: cpu, cuda, traffic, experiment, tune.
"""

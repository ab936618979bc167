"""Warm up: have an engine compute known prompts, and prove that they are hits afterwards.

prompts      what to warm up, read from the forms that people have
transport    requests to a running server | offline: to an engine in a child process; same API, same bytes
server       the few endpoints of vLLM's OpenAI-compatible API that this needs
grouping     which prompts share a prefix; shards; what is computed once
volatile     clocks and ids in a prompt, which end what can be reused
passes       requests in parallel, bounded in time
job          the whole of it: render, first requests, proofs, report
"""

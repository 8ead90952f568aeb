"""Commands that a sample runs in the world, each at most once.

sandbox.py        intent durable before a command runs, result durable before its tokens are used
sandbox_agent.py  the process that runs one command once
"""

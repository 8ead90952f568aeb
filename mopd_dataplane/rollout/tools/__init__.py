"""Environments that reply to the policy, and the commands they run, each at most once.

environments.py   Environment: replies at the end of the policy's turn; found by name
replies.py        a conversation as tokens: which are the policy's, and how the student reads a reply
sandbox.py        intent durable before a command runs, result durable before its tokens are used
sandbox_agent.py  the process that runs one command once
"""

"""Environments that reply to the policy, and the commands they run, each at most once.

environments.py   Environment: what replies at the end of the policy's turn; by name
replies.py        a conversation as tokens: whose each is, and what the student reads of a reply
sandbox.py        intent durable before a command runs, result durable before its tokens are used
sandbox_agent.py  the process that runs one command once
"""

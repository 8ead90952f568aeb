"""The student writes: prompts become samples, and every token is logged as it is decoded.

prompts.py    where prompts come from, and how a model reads them
engine.py     what a generation engine must do
hf.py         the Hugging Face engine: batched decoding with continuous refill
sampling.py   a token as a pure function of (logits, sample key, position)
draft.py      a sample being written
messages.py   what the token log says
ledger.py     the messages replayed: live state and recovered state are one thing
sandbox.py    commands in the world, at most once
framing.py    records and segments as bytes
wal.py        the token log: append, wait until durable, rotate, retire
recovery.py   from the bytes of a dead process to the ledger it had
committer.py  finished samples into the store, off the decode path
runner.py     run_rollout: the loop
"""

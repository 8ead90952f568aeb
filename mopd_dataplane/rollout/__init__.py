"""PROMPTS -> SAMPLES: the student writes, and every token is logged as it is decoded.

runner.py          run_rollout: prompts in, samples in the store
loop.py            the decode loop: keep the slots busy, log every step, pass finished samples on
partial_sample.py  a sample that is being written
stop_strings.py    stop strings, matched over the whole response as it grows
policy_update.py   which policy version writes which token when weights change
committer.py       commits finished samples to the store, in a thread of its own
rollout_report.py  counts and rates of one call of run_rollout
engines/           generation engines: Hugging Face, vLLM on this machine, a vLLM server
log/               the token log
tools/             environments, and the commands that they run
"""

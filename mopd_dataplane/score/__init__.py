"""SAMPLES → SIGNALS: what every teacher says of what the student wrote, and what a verifier says of the answer.

scorer.py               samples and a teacher in, signals out: one forward pass a batch serves every kind
model_input.py          a sample, and the same as the teacher reads it
signal_kinds.py         which kinds of signals there are, and how each follows from hidden states
teacher_pool.py         any number of teachers on disk, a bounded number in memory
adapted_base.py         teachers that are adapters on one base, which is in memory once
teacher_forward.py      one teacher ready to score: one reader, or several whose logits are added with weights
readers.py              what turns token ids into the states behind them
states.py               the states that predict given tokens, many sequences in one forward pass
topk_source.py          whose likeliest tokens a teacher is asked about
vllm_states.py          teachers in vLLM as pooling models: states
vllm_extract.py         teachers in vLLM as generating models: states
vllm_connector.py       the part of vllm_extract.py that runs inside vLLM
vllm_logprobs.py        teachers in vLLM as generating models: log-probs
vllm_batch.py           vLLM started here to read texts
quantise.py             quantised teachers, through torchao
quantisation_effect.py  what quantising a teacher does to what it says
reward.py               outcome rewards: (prompt, response) -> a number
discriminator.py        a discriminator that rewards what reads like the teacher (GAD)
teacher_comparison.py   which teacher suits a domain
"""

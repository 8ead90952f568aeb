"""Generation engines, and how each draws a token.

engine.py             Engine, the protocol between the runner and any engine
kinds.py              the kinds of engines: what each can do, and how it is opened
hf.py                 the Hugging Face engine: batched decoding with continuous refill
decoder.py            one model that decodes rows side by side
slot_cache.py         the cache of every row: keys, values and recurrent states
kv_file.py            keys and values in one safetensors file, from a graceful stop to the next start
vllm.py               vLLM on this machine
vllm_server.py        a running vLLM server, by its URL: a streaming completion for every live slot
streaming.py          common base of the engines that run in another process, and their tokens as they arrive
sampling.py           a token as a pure function of (logits, sample key, position); the samplers by name
grouped_gumbel.py     the sampler of new samples
device_sampling.py    the same draws on the device of the logits, for a GPU
nucleus.py            the boundary of a cut to the likeliest tokens
gumbel.py             the sampler of logs that name none
philox.py             the random numbers of a key and a position
vllm_sampler.py       sampling.py as a logits processor inside vLLM
sampler_arguments.py  arguments of a vLLM request for that processor
engine_check.py       self-check of an engine in another process: its log-probs beside the model's plain pass
call_timeout.py       a deadline for each call of an engine
"""

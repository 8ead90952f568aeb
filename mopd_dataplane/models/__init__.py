"""Models on disk and behind a server.

adapter_files.py    adapter folders, and the base that each belongs on
adapters.py         LoRA adapters in a transformers model: put in, switched, written, merged
architecture.py     what a config implies: context, attention, the part before the LM head
chat_template.py    conversations as tokens: where an answer begins, and the token that ends it
devices.py          which device a model goes to, and freeing its memory
hf.py               Hugging Face models and tokenizers: loading, saving, digests, the pass that stops before the LM head
hub.py              models by their Hugging Face name
initial_weights.py  the model a job starts from, made once
layer_types.py      which tokens each type of layer sees, and what it keeps
render_limits.py    bounds on the time and memory of rendering a chat template
router_replay.py    which experts each token was sent to: recorded while decoding, replayed in training
self_check.py       sampler, teacher and trainer against transformers' plain pass
tiny.py             tiny random models with the architecture and tokenizer of another model, or of a model family
vllm_adapters.py    adapters in a vLLM that was started here, as LoRA requests
vllm_local.py       vLLM on this machine, its core in a process of its own
vllm_replies.py     what a vLLM server may answer: the form of each reply and the range of its log-probs
server_identity.py  what a model at a server is known by: its name there, and log-probs of fixed texts
vllm_server.py      a running vLLM server by its URL
vllm_worker.py      the part of vllm_adapters.py that runs inside vLLM
vocabulary.py       whether two tokenizers mean the same by their ids
"""

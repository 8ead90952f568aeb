"""Models on disk and behind a server.

adapter_files.py    adapter folders, and the base that each belongs to
adapters.py         LoRA adapters in a transformers model: add, switch, save, merge
architecture.py     facts that a config implies: context length, attention, the part before the LM head
average.py          moving averages of policies
chat_template.py    conversations as tokens: where an answer begins, and the token that ends it
checkpoint_quantisation.py checkpoints that are published quantised: read as plain weights, or refused
config_files.py     reads config.json of a model folder
devices.py          chooses the device of a model, and frees its memory
echo_replies.py     texts read by OpenAI's completions API with `echo`: the request, and its checked answer
hf.py               Hugging Face models and tokenizers: loading, saving, digests, the pass that stops before the LM head
hub.py              models by their Hugging Face name
initial_weights.py  the initial model of a job, made once
layer_types.py      which tokens each type of layer sees, and what it caches
render_limits.py    bounds on the time and memory of rendering a chat template
router_replay.py    the experts that each token was sent to: recorded while decoding, replayed in training
self_check.py       compares sampler, teacher and trainer with transformers' plain pass
tiny.py             tiny random models with the architecture and tokenizer of another model, or of a model family
vllm_adapters.py    adapters in a vLLM started by this process, as LoRA requests
vllm_local.py       vLLM on this machine, its core in a separate process
vllm_replies.py     replies of a vLLM server: the form of each, and the range of its log-probs
sglang_replies.py   texts read by SGLang's own API: the requests, and their checked answers
server_identity.py  identifies a model at a server by its name there and by log-probs of fixed texts
vllm_server.py      a running vLLM server by its URL
vllm_worker.py      the part of vllm_adapters.py that runs inside vLLM
token_bytes.py      the bytes that each token of a tokenizer stands for
token_chunks.py     chunks of one text in the tokens of two tokenizers
vocabulary.py       checks that two tokenizers mean the same tokens by their ids
"""

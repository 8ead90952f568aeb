"""SAMPLES → SIGNALS: teachers' values for the student's tokens, and verifiers' rewards for its answers.

scorer.py               scores samples with a teacher: one forward pass per batch yields every kind of signal
signal_kinds.py         the kinds of signals, and how each follows from hidden states; the student's likeliest tokens
teacher_pool.py         any number of teachers on disk, a bounded number in memory
head_files.py           LM heads of teachers: their files, and two rows exchanged
own_tokens.py           a teacher of another tokenizer: the student's text in its tokens, and its log-probs back
token_projection.py     distributions of such a teacher over the student's tokens
scorer_check.py         compares a teacher in vLLM or behind a server with the plain pass of its folder
adapted_base.py         teachers that are adapters on one base, which is loaded once, here or in vLLM
engines.py              engines that run teachers, and their capabilities
readers.py              turns a sample, as a teacher reads it, into states; several readers blended into one teacher
segments.py             a long text read in segments
vllm_states.py          teachers in vLLM as pooling or as generating models: states
vllm_connector.py       the part of vllm_states.py that runs inside vLLM
vllm_logprobs.py        teachers in vLLM as generating models: log-probs
echo_logprobs.py        teachers behind OpenAI's completions API with `echo`: log-probs
sglang_logprobs.py      teachers behind SGLang's own API: log-probs, also of the student's likeliest tokens
server_use.py           requests, retries and prompt tokens that a teacher's server was sent
vllm_batch.py           vLLM that reads texts, started here or behind a server
quantise.py             quantised teachers, through torchao
reward.py               outcome rewards: (prompt, response) -> a number
timed_reward.py         a reward function in a process of its own, with a time-out
discriminator.py        a discriminator that rewards text like the teacher's (GAD)
health.py               figures of a signal, from the log-probs that are stored anyway
health_checks.py        which figures are unhealthy: thresholds, reasons, and what a message says
probe.py                reference answers and a teacher's own text, scored before the first step
teacher_comparison.py   compares the teachers of a domain, and a teacher with its quantised weights
routing.py              proposes a teacher for each domain, from such figures
"""

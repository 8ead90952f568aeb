"""BATCHES → POLICY: a declared objective, one optimizer step after another, checkpoints, a new policy folder.

spec.py              settings of the trainer process
run.py               the windows of a plan log: resume, step, checkpoint, publish
loop.py              one optimizer step
passes.py            cuts a step into forward passes
microbatch.py        turns packs into the tensors of one forward pass, on the device
student.py           the policy as a module whose forward pass ends in a loss
attention.py         causal attention over packed sequences
context.py           context parallelism: ranks share a pack
objective.py         the loss: a sum of declared terms over the trained tokens
advantage.py         the advantage of a sampled token
teacher_parts.py     which tokens of a sample its teacher judges
plugin_divergence.py  a divergence of another package, computed in parts of the tokens
heads.py             teacher heads: one on the device, the next read ahead
topk_agreement.py    how far student and teacher agree on their likeliest tokens
sampler_gap.py       compares the trainer's log-probs of its own samples with the sampler's
token_stats.py       per-token statistics of a step, in files for the job
optimizer.py         AdamW, also on float32 copies on the device or on the host, and the clipping of gradients
checkpoint.py        atomic checkpoints of policy, optimizer and position
spikes.py            steps whose update is not applied: not finite, or a gradient far above those before
failed_step.py       the spike at which a trainer stopped, for the job
newest.py            finds the newest checkpoint; needs no torch
ranks.py             the processes of one training run
node_agent.py        the trainer processes of one node
stop.py              stopping at a checkpoint
metrics.py           metrics.jsonl, and the trackers that mirror it: TensorBoard, W&B and others
"""

"""Other libraries on a store: trainers with the loader's batches and this project's objectives as loss, and
evaluations.

planned_steps.py  the optimizer steps that a store has planned for a stage, as a dataset of torch
torch_dataset.py  the same with copied tensors, ranks and a position, for loops that take a DataLoader
store_loss.py     a declared objective as the loss of a step, forward pass by forward pass
hf_trainer.py     StoreTrainer for Hugging Face's Trainer
trl.py            StoreTrainer for TRL: an SFTTrainer, with its adapters, callbacks and model cards
nemo_rl.py        NeMo-RL's data plane over a store
lm_eval.py        policies of a store evaluated by lm-eval
verifiers.py      tasksets of verifiers: prompts, tools and rewards of a domain
"""

"""Import of other frameworks' rollouts, and export of samples.

row_files.py       JSONL, Parquet and Arrow files as fields with their place
rows.py            Row, what every format comes down to, and the messages in it
formats.py         the fields of each format -> Row; by name
traces.py          message graphs of prime-rl and verifiers
trajectories.py    older trajectories of prime-rl, and what tinker-cookbook writes
chats.py           chat completions, supervised fine-tuning, preferences
vocabulary.py      text and messages as the model to train reads them
importer.py        Row -> samples, prompts, rewards and signals; all is checked before anything is written
teachers_in.py     the teachers of imported signals, and their LM heads
signal_entries.py  signals as entries of an exported row, and back
exporter.py        samples of a store -> a Parquet, JSONL or Arrow file, or a folder of Hugging Face datasets
export_forms.py    the forms of an exported row: everything, text, messages, exact tokens
export_traces.py   samples as episodes of verifiers and prime-rl
"""

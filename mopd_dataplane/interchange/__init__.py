"""Import of other frameworks' rollouts, and export of samples.

row_files.py       reads JSONL, Parquet and Arrow files as rows of fields with their location
rows.py            Row, the common form of every format, and the messages in it
formats.py         readers of each format, by name: its fields -> Row
traces.py          message graphs of prime-rl and verifiers
trajectories.py    older trajectories of prime-rl, and the files of tinker-cookbook
chats.py           chat completions, supervised fine-tuning, preferences
vocabulary.py      encodes text and messages as the model to train reads them
conversion.py      Row -> a sample and its prompt
importer.py        rows -> samples, prompts, rewards and signals of a store; all are checked before any is written
followed_files.py  files that another program still writes: each complete row once
follow.py          imports the rows of followed files as they come
queue_values.py    values of a queue as numpy arrays and plain objects
queue_mapping.py   which fields of a framework's queue are what of a rollout
queue_rollouts.py  values of a queue -> samples of its store, before they are cleared
teachers_in.py     the teachers of imported signals, and their LM heads
signal_entries.py  signals as entries of an exported row, and back
exporter.py        samples of a store -> a Parquet, JSONL or Arrow file, or a folder of Hugging Face datasets
export_forms.py    the forms of an exported row: everything, text, messages, exact tokens
export_traces.py   samples as episodes of verifiers and prime-rl
"""

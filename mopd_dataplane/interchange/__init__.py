"""Other frameworks' rollouts in, samples out.

row_files.py  JSONL and Parquet files as fields with their place
formats.py    the fields of each format -> Row
importer.py   Row -> samples, prompts and rewards of a store; everything is checked before anything is written
exporter.py   samples of a store -> Parquet, JSONL or a Hugging Face dataset that can be imported again
"""

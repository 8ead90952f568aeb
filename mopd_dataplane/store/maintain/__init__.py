"""Upkeep: compaction, the audit, deletion, copies and upgrades.

free_hidden.py       freeing hidden states
whole.py             checks that every table and file is present, before a command that writes
compaction.py        counts, compaction, clean-up
verify.py            the audit
verify_report.py     findings of an audit, and its progress
verify_apart.py      the audit in a process of its own, which damaged bytes may end
verify_rows.py       the audit of rows of metadata
verify_payload.py    the audit of payload: its bytes, and the lengths of its lists
verify_alignment.py  the audit of alignments: equal bytes in the tokens of student and teacher
verify_linked.py     the audit of linked samples, whose payload is in other stores
verify_files.py      the audit of the files beside the tables
verify_deleted.py    the audit of deletions: their records, and the search for deleted names
upgrade.py           tables of format 1, copied into format 2
copy_samples.py      copying matching samples, with everything that refers to them, to a new store
copy_tables.py       copying every table unchanged, file by file
share_tables.py      a new store with the same tables, under second names of their files
cut_rows.py          removing from it what a run did after a point
copy_target.py       the target of a copy: one writer, continued or begun anew
copy_files.py        the end of a copy, and the files beside the tables
deletion_records.py  records of deletions, by identity alone
remove_rows.py       removing rows from one table
delete_samples.py    removing samples and prompts from every table
"""

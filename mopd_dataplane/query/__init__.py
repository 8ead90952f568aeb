"""STORE -> ANSWERS: one sample token by token, where a step's samples came from, one HTML page.

show.py           one sample, token by token: what is shown
show_terminal.py  one sample on a terminal: how it is shown
pick.py           which sample to show when no uid is given
lineage.py        what led to a sample or a step, and what used it
report.py         the HTML page
compare.py        two policies on the same held-out prompts
corrections.py    tokens that teachers disliked, and what they would have written
red_pen.py        the head of the page: what teachers correct, version by version
heads.py          a teacher's logits from stored hidden states and its head
sections.py       its sections
run_sections.py   its sections on how the run went and what it was made with
measures.py       its numbers, one SQL statement each
exactness.py      self-checks of the models, and trainer against sampler
signal_health.py  health of teachers' signals, and the checks that fail
run_curves.py     curves over iterations and steps, which the viewer draws too
change_marks.py   changes of the job in the middle of a run, as rows and as lines in the curves
ancestry.py       the run that a store was forked from, and its forks
spent.py          answers, tokens and seconds that a policy version cost
sweep.py          curves and paired differences of the arms of a sweep
sweep_report.py   the page of a sweep, and its table
answers.py        held-out answers of every policy, prompt by prompt
statistics.py     shares, paired differences and recovery, with their intervals
plots.py          its plots, inline SVG
text.py           text for display: control characters shown as marks, numbers with units
job.py            the job.json that a store keeps
still_to_write.py  what the iterations to come will add to a store
"""

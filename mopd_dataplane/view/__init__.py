"""STORE → PAGE: `mopd view`, a local server and the page a researcher reads rollouts on.

index      one row a sample: metadata, reward and every teacher's divergence, in memory, filtered by SQL
sample     one sample with every teacher's signal; topk: what each would have said instead
prompt     all answers to a prompt; life: what became of a sample; run, teachers, packs: the job as a whole
app        routes; guard: who may ask; server: the process; export: the same page as files
assets/    the page: ES modules, one style sheet, uPlot; no build step
"""

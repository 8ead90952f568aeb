"""STORE → PAGE: `mopd view`, a local server and the page a researcher reads rollouts on.

    columns.py        one row a sample: metadata, reward and every teacher's divergence, as a statement over the tables
    index.py          those rows in memory: pages and counts by SQL
    histograms.py     counts of columns of the index, over all rows and over those that match
    glance.py         pages and samples while the index is still being made
    stores.py         the stores of one server, each with its newest index
    sample.py         one sample with every teacher's signal
    topk.py           what each teacher would have said at one position
    student.py        what the student would have said there, read from its weights
    prompt.py         all answers to a prompt, and how two differ
    life.py           what became of a sample
    search.py         regular expressions and token ids in what was written
    run_page.py       curves, steps, times and settings of the run
    teachers_page.py  what each teacher said of each domain
    packs.py          one training step as it lay in memory
    compare.py        two stages, iterations or stores, paired by prompt
    live.py           samples that are still being written
    labels.py         what readers put on samples: the only thing the viewer writes
    app.py            routes
    guard.py          who may ask
    server.py         the process
    bundle.py         the page as one script
    export.py         the page over chosen samples as files

`assets/` is the page: ES modules, one style sheet, uPlot; there is no build step.
"""

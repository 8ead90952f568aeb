"""STORE → PAGE: `mopd view`, a local server and the page a researcher reads rollouts on.

    rollout_rows.py   rows of the table of rollouts for some samples, read by row
    index.py          pages and counts by SQL
    histograms.py     counts of columns, over all rows and over those that match
    shown.py          a store that is shown, or a snapshot of one, with its index
    stores.py         the stores of one server and the snapshots of them that it keeps
    sample.py         one sample with every teacher's signal
    topk.py           each teacher's likeliest tokens at one position
    student.py        the student's likeliest tokens there, computed from its weights
    prompt.py         all answers to a prompt, and how two differ
    life.py           the history of a sample
    matches.py        the result of a search
    search.py         search for regular expressions and token ids in responses
    red_pen.py        what each teacher corrects in the student's answers: the first page
    run_state.py      how far the run is, and its worst answers: the top of the first page
    run_page.py       curves, steps, times and settings of the run
    teachers_page.py  figures of each teacher in each domain
    packs.py          the packs of one training step
    compare.py        two stages, iterations or stores, paired by prompt
    live.py           samples that are still being written
    labels.py         labels that readers give samples: the only thing the viewer writes
    typed_query.py    a statement that a reader typed, in a process of its own
    plain.py          answers as JSON
    app.py            routes
    addresses.py      port, token and tunnel of a server, and the reader's browser
    guard.py          which requests are accepted
    server.py         the process
    bundle.py         the page as one script
    export.py         the page over chosen samples as files

`assets/` is the page: ES modules, one style sheet, uPlot; there is no build step.
"""

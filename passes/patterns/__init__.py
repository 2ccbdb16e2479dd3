"""One file per source form; each proposes sites structurally and leaves the proof to evaluation.

To add a source form: write a module with NAME, `anchors(graph)` (the nodes that may stand for a site) and
`propose(node)` (a Proposal, or a Mismatch whose sentence names what was expected and what was found); list it
in find.py; take its operators out of unsupported.py; add its almost-right graphs to tests/passes. Scales,
masks, head maps and numbers need no code of their own: trial.py, masks.py and prove.py evaluate every form.
"""

"""Tools for developing this project. They are not part of the installed package.

Run them from the root of a checkout; ``--help`` lists the options of each.

    python -m tools.compare      our server beside llama-server, one client or several
    python -m tools.replay       the policy of ``auto`` on recorded steps
    python -m tools.upscale      a larger model with the same logits
    python -m tools.judge        ``auto`` beside the best single method, over many runs of the bench
    python -m tools.screenshot   the screenshot for the docs and the film for the README

``run`` and ``check`` install, start and check the project.
"""

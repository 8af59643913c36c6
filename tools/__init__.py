"""Tools for developing this project. They are not part of the installed package.

Run them from the root of a checkout; ``--help`` lists the options of each.

    python -m tools.compare      our methods beside llama.cpp's own programs
    python -m tools.clients      several clients at a time, of our server and of llama-server
    python -m tools.judge        ``auto`` beside the best single method, over many runs of the bench
    python -m tools.network      models computed by workers, at several delays of the network
    python -m tools.gpu_report   everything that a GPU may change, in one report
    python -m tools.replay       the policy of ``auto`` on recorded steps
    python -m tools.upscale      a larger model with the same logits
    python -m tools.screenshot   the screenshot for the docs and the film for the README

``run`` and ``check`` install, start and check the project.
"""

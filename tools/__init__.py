"""Tools for those who work on this project. They are not in the installed package.

Run them from the root of a checkout; ``--help`` lists the options of each.

    python -m tools.upscale --width 2048 --layers 24 --out big.gguf
        a wider and deeper model with the same logits, to measure what rows cost in a large model
    python -m speculation.bench --compare-llama-cpp DIR       (or python -m tools.compare ...)
        our methods beside llama.cpp's own programs, built in DIR
    python -m tools.screenshot
        the picture of the page in the docs
    python -m tools.recipe.train, .export, .distil, ...
        how the bundled models were made; needs the extra ``train``
"""

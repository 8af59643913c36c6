"""Tools for developing this project. They are not part of the installed package.

Run them from the root of a checkout; ``--help`` lists the options of each.

    python -m tools.upscale --width 2048 --layers 24 --out big.gguf
        write a larger model with the same logits, to measure speed at a large model's cost
    python -m tools.compare DIR
        compare our methods with llama.cpp's own programs, built in DIR
    python -m tools.screenshot
        take the screenshot for the docs
    python -m tools.recipe.train, .export, .distil, ...
        train the bundled models; needs the extra ``train``
"""

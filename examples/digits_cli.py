"""The digit classifier, configured by a file and on the command line.

    python examples/digits_cli.py fit --config examples/digits.yaml model.lr=1e-3 trainer.max_epochs=5
    python examples/digits_cli.py test --ckpt_path runs/digits/loopwright_logs/version_0/checkpoints/last.ckpt

`--help` lists the settings; `--print-config` prints the merged configuration.
"""

from __future__ import annotations

from digits import Classifier, Digits

import loopwright as lw

if __name__ == "__main__":
    lw.cli.CLI(Classifier, Digits)

"""The digits again, configured by a file and on the command line.

    python examples/digits_cli.py fit --config examples/digits.yaml model.lr=1e-3 trainer.max_epochs=5
    python examples/digits_cli.py test --ckpt_path runs/digits/loopwright_logs/version_0/checkpoints/last.ckpt

`--help` says what can be set; `--print-config` what all of it comes to.
"""

from __future__ import annotations

from digits import Classifier, Digits

import loopwright as lw

if __name__ == "__main__":
    lw.cli.CLI(Classifier, Digits)

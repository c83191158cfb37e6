"""BERT, pass by pass; see `bert_test.sh`."""

from pathlib import Path

from cfp_test.passes import model_passes

if __name__ == "__main__":
    raise SystemExit(model_passes.main("bert", Path(__file__).parent))

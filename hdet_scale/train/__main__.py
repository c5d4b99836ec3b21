"""`python -m hdet_scale.train`: the same as `hdet train`; under a launcher, one rank of it."""

from hdet_scale.train.command import main

if __name__ == "__main__":
    raise SystemExit(main())

"""Packaging. `kernels/` is installed as `hdet_scale.kernels`: a top-level package called
`kernels` would clash with one on the package index."""

from pathlib import Path

from setuptools import find_packages, setup

EXTRAS = {
    "triton": ["triton>=3.4"],
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    "report": ["rich>=13"],
    "boards": ["tensorboard>=2.18", "wandb>=0.19"],
    "hf": ["transformers>=5.0", "accelerate>=1.10"],
    "lightning": ["lightning>=2.5"],
    "bench": [
        "scikit-learn>=1.5",
        "prodigyopt>=1.1",
        "dadaptation>=3.2",
        "schedulefree>=1.4",
        "mechanic-pytorch>=0.0.1",
        "momo-opt>=0.1",
        "prodigy-plus-schedule-free>=2.0",
        "matplotlib>=3.8",
    ],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "numpy>=1.26",
    ],
    "dev": ["ruff>=0.15", "mypy>=1.15", "pre-commit>=4"],
}

setup(
    name="hdet_scale",
    version="0.1.0",
    description="Hyperparameter-divergent ensemble training: the learning-rate search "
    "inside the training run that is being paid for anyway.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["hdet_scale", "hdet_scale.*"]), "hdet_scale.kernels"],
    package_dir={"hdet_scale": "hdet_scale", "hdet_scale.kernels": "kernels"},
    package_data={
        "hdet_scale": ["py.typed"],
        "hdet_scale.runs": ["page/*.*", "page/figures/*.js"],
        "hdet_scale.kernels": ["py.typed"],
    },
    install_requires=["torch>=2.8"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hdet = hdet_scale.cli:main"]},
)

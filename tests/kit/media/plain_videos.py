"""What plain vLLM, with its own reader of videos, makes of chats with them.

    python -m tests.kit.media.plain_videos MODEL FRAMES TOKENS FILE < MESSAGES

The messages are a JSON list of lists. It appends to FILE a line of JSON for each: the number of tokens of the
prompt, and the tokens of the answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.kit.engines.vllm_reference import reference


def main(arguments: Sequence[str]) -> None:
    """Answer, as the module says."""
    model, frames, tokens, found = arguments
    # The loader of most models; those of Qwen2-VL's own take two frames of each second.
    reader = {"video_backend": "opencv", "num_frames": int(frames), "fps": -1}
    with (
        reference(Path(model), None, max_model_len=1024, media_io_kwargs={"video": reader}) as vllm,
        Path(found).open("a") as lines,
    ):
        for messages in json.load(sys.stdin):
            done = vllm.chat(messages, max_tokens=int(tokens), temperature=0.0, ignore_eos=True)
            answer = [len(done.prompt_token_ids), list(done.outputs[0].token_ids)]
            lines.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Chat with a model in the terminal, token by token.

    python examples/chat.py MODEL [--engine vllm]

MODEL is a directory or a name on the Hub, such as Qwen/Qwen3-0.6B, with a chat template. An empty line ends the chat; Ctrl-C
ends an answer, which also stops the engine."""

from __future__ import annotations

import argparse
import contextlib

import slipstream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    parser.add_argument("--max-tokens", type=int, default=512)
    options = parser.parse_args()
    sampling, messages = slipstream.SamplingParams(max_tokens=options.max_tokens, temperature=0.7), []
    with slipstream.launch(options.model, engine=options.engine) as bridge:
        while text := input("> "):
            messages.append({"role": "user", "content": text})
            answer = ""
            with contextlib.suppress(KeyboardInterrupt):
                for event in bridge.stream_tokens(messages, sampling):
                    if isinstance(event, slipstream.Failure):
                        raise event.error
                    answer += event.text
                    print(event.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()

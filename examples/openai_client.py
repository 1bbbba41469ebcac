"""Call a Paceline server with the OpenAI client, whole and streamed.

    PACELINE_URL=http://127.0.0.1:8000 python examples/openai_client.py

PACELINE_API_KEY is the key, where the server wants one.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PACELINE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PACELINE_API_KEY", "none"),
)
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Name a colour."}], temperature=0, max_tokens=16
)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Count to five."}],
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")

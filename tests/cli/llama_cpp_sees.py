"""Answer by llama.cpp itself, in a process of its own: python llama_cpp_sees.py MODEL MMPROJ QUESTION PICTURE...

Prints a line of JSON for each picture: tokens of the prompt, and the log-probabilities of the first token of the answer by id;
none where that is half a letter.
"""

import base64
import json
import sys
from pathlib import Path

import xllamacpp

model, mmproj, question, *pictures = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.mmproj.path = model, mmproj
params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup, params.verbosity = 256, 1, 1, False, 0
params.port = 0
server = xllamacpp.Server(params)
for picture in pictures:
    url = "data:image/png;base64," + base64.b64encode(Path(picture).read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "logprobs": True, "top_logprobs": 480}
    answer = server.handle_chat_completions(asked | {"cache_prompt": False})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    said = answer["choices"][0].get("logprobs")
    top = {t["id"]: t["logprob"] for t in said["content"][0]["top_logprobs"]} if said else None
    print(json.dumps([answer["usage"]["prompt_tokens"], top]), flush=True)

"""The OpenAI-compatible HTTP server over the inference engine.

- `app`: routes; `server`: the process (start, drain, stop); `config`: its settings
- `schema`: request bodies; `sampling`: their fields as `SamplingParams`; `completions`, `chat`: answers, whole or
  streamed; `tool_calls`: tools
- `events`: what a request's reader waits for and takes; `guards`: API key and size limits; `metrics`: Prometheus
- `page.html`: chat and completion in a browser
"""

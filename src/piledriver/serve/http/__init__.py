"""The OpenAI-compatible HTTP server over the inference engine.

- `app`: routes; `server`: the process (start, drain, stop); `config`: its settings
- `schema`: request bodies; `sampling`: their fields as `SamplingParams`; `completions`, `chat`: answers, whole or
  streamed; `tool_calls`: tools
- `events`: from the engine's thread to the event loop; `guards`: API key and size limits; `metrics`: Prometheus
- `page.html`: chat and completion in a browser
"""

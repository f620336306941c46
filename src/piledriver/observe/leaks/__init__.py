"""Find what grows from step to step, and the line that makes it grow. `watch.LeakWatch` is the entrance."""

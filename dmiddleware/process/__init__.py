"""What a process needs: signals, its terminal, threads, memory and pipes."""

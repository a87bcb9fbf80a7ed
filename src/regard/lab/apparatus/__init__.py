"""What all experiments are made with: their frame, several seeds, parts of pictures, and memory
that is measured."""

"""What is asked of the weights of a call, whichever backend answers."""

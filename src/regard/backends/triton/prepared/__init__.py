"""What calls will need before they need it: the commonest of them, their kernels compiled without a
card, and those of a call to come."""

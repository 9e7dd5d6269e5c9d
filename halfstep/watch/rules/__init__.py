"""The rules of the guard, one a file, each under the name RULE; halfstep.watch.guard finds them."""

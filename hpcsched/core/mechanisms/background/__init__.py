"""Jobs in the background of a GPU, at a low priority beside the foreground job."""

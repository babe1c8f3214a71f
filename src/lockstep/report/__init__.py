"""`lockstep report`: an HTML page of one run or several."""

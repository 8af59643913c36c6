// The box for messages: what was said, what is typed, and who has the focus.

// A phone's keyboard is left where it is.
function focusBox() {
  if (matchMedia("(hover: hover)").matches) document.querySelector("#box textarea")?.focus();
}

// The message is what stands in the box now, not when Gradio gets round to it.
function noteSaid(event) {
  const box = document.querySelector("#box textarea");
  if (box && (event.key === "Enter" ? event.target === box : event.target.closest("#box button"))) {
    const entry = document.querySelector("#entry");
    entry.said = { text: box.value, files: filesOf(entry) };
  }
}
document.addEventListener("keydown", noteSaid, true);
document.addEventListener("click", noteSaid, true);

// What is typed is kept at once; with the server away, Gradio's own events would come too late.
document.addEventListener("input", (event) => {
  if (!event.target.matches("#box textarea")) return;
  event.target.dir = "auto";
  try {
    sessionStorage.setItem("typed", event.target.value);
  } catch (error) {
    console.warn(error); // there is no room
  }
});

// Send and Stop take each other's place, and would take the focus along; after New chat a message
// comes next.
document.addEventListener("click", (event) => {
  if (event.target.closest("#box button, #new")) focusBox();
});
